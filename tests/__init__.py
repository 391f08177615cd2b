"""The tests, one folder a layer; the folder gives each test its marker."""
