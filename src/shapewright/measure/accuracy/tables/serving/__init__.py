"""Tables of whole inference engines under load."""
