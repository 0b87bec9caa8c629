"""How many replicas: the serving code itself on a virtual clock, over measured costs and recorded or drawn arrivals."""
