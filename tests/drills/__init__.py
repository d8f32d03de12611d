"""Does training have the bits of stock, or an error with the remedy, where something is missing or full?"""
