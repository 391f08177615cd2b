"""The pure core: decides, and does nothing."""
