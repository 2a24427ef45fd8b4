"""One rank's device: it does what messages say."""
