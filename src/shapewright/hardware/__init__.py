"""Devices: what vendors say about their accelerators, one file per SKU, with the source of every number."""

from shapewright.hardware.catalogue import find_aliases as find_aliases
from shapewright.hardware.catalogue import list_devices as list_devices
from shapewright.hardware.detect import detect_device as detect_device
from shapewright.hardware.fileformat import device_of as device_of
from shapewright.hardware.loader import load_device as load_device
from shapewright.hardware.loader import load_named_device as load_named_device
from shapewright.hardware.loader import read_device_file as read_device_file
from shapewright.hardware.measured_names import find_measured_device as find_measured_device
from shapewright.hardware.measured_names import is_exact_name as is_exact_name
from shapewright.hardware.nodes import with_nodes as with_nodes
from shapewright.hardware.spec import PRICING_FIELDS as PRICING_FIELDS
from shapewright.hardware.spec import Device as Device
from shapewright.hardware.template import device_template as device_template
