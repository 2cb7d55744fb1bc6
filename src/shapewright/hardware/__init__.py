"""Devices: accelerator data sheets, one file per SKU, with the source of every number."""

from shapewright.hardware.device import PRICING_FIELDS as PRICING_FIELDS
from shapewright.hardware.device import Device as Device
from shapewright.hardware.device_file import build_device as build_device
from shapewright.hardware.device_file import device_template as device_template
from shapewright.hardware.loader import detect_device as detect_device
from shapewright.hardware.loader import find_aliases as find_aliases
from shapewright.hardware.loader import find_measured_device as find_measured_device
from shapewright.hardware.loader import is_exact_name as is_exact_name
from shapewright.hardware.loader import list_devices as list_devices
from shapewright.hardware.loader import load_device as load_device
from shapewright.hardware.loader import load_named_device as load_named_device
from shapewright.hardware.loader import note_on_board as note_on_board
from shapewright.hardware.loader import read_device_file as read_device_file
from shapewright.hardware.nodes import with_nodes as with_nodes
