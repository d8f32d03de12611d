"""What happens in each step, from the first gradient to the last updated parameter?"""
