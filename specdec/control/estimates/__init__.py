"""What the controller estimates from measurements: costs of forwards, acceptance rates, yields of drafters."""
