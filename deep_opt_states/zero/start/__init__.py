"""How are the updates checked, planned and built, once, before the first step?"""
