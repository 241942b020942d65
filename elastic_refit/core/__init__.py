"""Policy, pure: standard library only. No clock, random, environment, logging, asyncio, threads or I/O here."""
