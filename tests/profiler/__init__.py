"""Do the probes measure the rates that they name?"""
