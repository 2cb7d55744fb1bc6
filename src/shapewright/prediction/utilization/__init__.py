"""Utilization of a measured step: MFU and HFU by every FLOP convention and peak, and the waterfall of losses."""
