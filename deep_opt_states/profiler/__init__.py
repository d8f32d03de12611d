"""How fast are the copies and updates of this machine? ``profile.measure`` returns a ``HardwareProfile``."""
