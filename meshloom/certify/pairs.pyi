from trainer.certify.pairs import *
