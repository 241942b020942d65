"""The control channel: beacons up, standing abort orders down, and nobody on it who can hold anybody else up."""
