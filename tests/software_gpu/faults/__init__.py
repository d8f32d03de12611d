"""Is every missing wait reported by the race check, and does it give wrong numbers on the device?"""
