"""Do units move between steps without a change of any bit?"""
