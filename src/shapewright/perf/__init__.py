"""Pricing: from operations and a device to seconds, with the reason. It knows no models."""
