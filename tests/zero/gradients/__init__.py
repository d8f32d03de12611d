"""Do gradients have the values of stock, and where are they copied?"""
