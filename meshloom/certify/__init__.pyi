from trainer.certify import *
