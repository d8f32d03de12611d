"""How does each step run, from the first gradient to the last updated parameter?"""
