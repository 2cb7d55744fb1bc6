"""Chart descriptions, one module per figure."""
