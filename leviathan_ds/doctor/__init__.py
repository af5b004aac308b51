"""Is this cluster fit for this run? Asked before any model is built: `launchers/doctor.py`, and every start."""
