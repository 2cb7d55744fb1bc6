"""Serving plans: sequences that fit, latency and throughput by layout, format, batch and chunking of prompts."""
