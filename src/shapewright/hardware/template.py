"""A device file to start from."""

from __future__ import annotations

_TEMPLATE = """\
# A device of your own. Values are in SI base units: bytes, bytes per second, FLOP/s, Hz, W.
# Sheets like to print sparse rates, twice the dense ones: those have a table of their own. Leave out what the sheet
# does not say: a number that is not here is unknown, and asking for it is an error, so nothing is ever predicted from
# a guess.
name = "my-device-80gb"        # lower case, words joined by '-'
title = "My Device 80 GB"      # name to print
vendor = "Somebody"
architecture = "other"         # or the family it shares kernels with: ampere, hopper, cdna3, ...
scope = "card"                 # what the numbers are of: card, die or package
# num_dies = 2                         # only where the numbers are of several dies together

memory_bytes = 80e9                    # 80 GB; better what a process sees: total_memory in torch, 79.1 GiB of an H100
memory_bandwidth_bytes_per_s = 2.0e12  # 2.0 TB/s

# These make tiles and waves possible; without them predictions are bounds.
num_sms = 100                          # streaming multiprocessors, compute units or matrix cores
boost_clock_hz = 1.5e9                 # the clock at which the rates below are quoted
tensor_fma_per_sm_per_clock = 1024     # dense fp16 fused multiply-adds of one SM in one clock
# l2_bytes = 41943040                  # 40 MiB
# shared_memory_per_sm_bytes = 166912  # 163 KiB, the most that one thread block may use

# tdp_watts = 400
# node_size = 8
# intra_node_link = "NVLink 3"
# link_group_size = 2                  # only where the link joins fewer than node_size, such as bridged pairs
# intra_node_bandwidth_bytes_per_s = 300e9  # per device, one direction
# inter_node_bandwidth_bytes_per_s = 25e9   # per device, one direction: 200 Gb/s
# pcie_bandwidth_bytes_per_s = 32e9         # one direction
# host_bandwidth_bytes_per_s = 450e9        # only where the host's memory is not behind PCIe: NVLink-C2C, one direction

[dense_flops_per_s]
fp16 = 307.2e12
bf16 = 307.2e12
# also: fp32, tf32, fp8, int8, fp4

# What the sheet gives with 2:4 sparsity, if anything; shown by mfu, never used in a prediction:
# [sparse_flops_per_s]
# bf16 = 614.4e12

# Where the numbers come from is welcome, one entry per number:
# [provenance]
# memory_bytes = { source = "sheet", place = "page 1", read = "2026-11-21", kind = "datasheet" }
# dense_flops_per_s.fp16 = { source = "sheet", place = "page 1", read = "2026-11-21", kind = "datasheet" }
#
# [sources.sheet]
# title = "My Device data sheet"
# publisher = "Somebody"
# url = "https://example.com/sheet.pdf"
"""


def device_template() -> str:
    """Return a commented device file that loads as it stands."""
    return _TEMPLATE
