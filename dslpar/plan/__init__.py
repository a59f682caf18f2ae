"""What a layout will look like and cost, before anything runs."""
