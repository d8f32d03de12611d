"""Are parameters, moments and losses those of stock, bit for bit?"""
