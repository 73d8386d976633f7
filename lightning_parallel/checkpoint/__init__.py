"""Mechanism: names and files of checkpoints that hold whole, layout-free tensors."""
