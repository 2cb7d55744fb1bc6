"""The measured tables that predictions are compared with."""
