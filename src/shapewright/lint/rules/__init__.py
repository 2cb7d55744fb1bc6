"""The rules, by subject; a rule is a check with the decorator ``rule``."""
