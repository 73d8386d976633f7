"""Mechanism: schedules, the cut of a model into stages, and the runtime that walks a schedule."""
