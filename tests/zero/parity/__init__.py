"""Are parameters, moments and losses bit-identical to stock's?"""
