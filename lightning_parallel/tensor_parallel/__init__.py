"""Mechanism: layers, plans and losses split over the tensor group."""
