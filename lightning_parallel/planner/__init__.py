"""Pure: what a model needs on given hardware: parameters, memory, time, and the layout to run it with."""
