"""Devices: accelerator data sheets, one file per SKU, with the source of every number."""
