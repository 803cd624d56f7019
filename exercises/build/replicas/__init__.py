"""The course of replicas: the router in front of them."""
