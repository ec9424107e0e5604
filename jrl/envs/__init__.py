"""Environments: transcripts, those on the device and those on the host, tools."""
