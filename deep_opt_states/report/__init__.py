"""What a user sees of an update that ran."""
