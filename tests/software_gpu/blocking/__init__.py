"""Where does a step make the host wait for the device, and does a copy ever do so?"""
