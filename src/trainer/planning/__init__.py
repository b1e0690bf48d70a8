"""The plan: which configuration fits its devices and is fastest."""
