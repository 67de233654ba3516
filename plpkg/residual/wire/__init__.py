"""The divided model across a network: one gRPC stream between a device and the cloud."""
