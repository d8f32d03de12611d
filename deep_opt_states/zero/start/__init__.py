"""What is checked, planned and reserved once, before the first step?"""
