"""Which placement of the sub-groups takes the least exposed time within the memory budgets?"""
