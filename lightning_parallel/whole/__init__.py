"""Mechanism: tensors of the plain model, whole, for code that runs between steps on ranks that hold parts of it."""
