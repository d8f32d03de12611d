"""Which machines and models are presets? Their figures are not measurements of the user's machine."""
