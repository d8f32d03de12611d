"""Which machines and models can be planned for by name? Presets are not measurements of the user's machine."""
