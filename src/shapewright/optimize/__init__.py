"""Better shapes and layouts: search, training plans, designs, serving plans."""
