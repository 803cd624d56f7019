"""What a client asks and gets. All of it runs in HTTP's process, which loads no torch."""
