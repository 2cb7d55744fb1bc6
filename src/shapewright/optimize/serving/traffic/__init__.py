"""Traffic: requests that arrive over time, on simulated servers with continuous batching."""
