"""Glue: the strategies that Lightning's Trainer takes by name or by object."""
