"""Tables and JSON from results; no arithmetic beyond shares and units."""
