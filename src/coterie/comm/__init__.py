"""The transport door: exchanges between ranks."""
