"""How fast are the copies and updates of this machine? ``profile.measure`` returns a ``HardwareProfile``.

Each of the ``probes`` repeats and times one kind of work, as those of ``copies`` do, on all ``ranks`` at the same time.
``cache`` keeps a quick profile for the next training run on an equal machine.
"""
