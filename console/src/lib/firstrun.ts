// The program that creates a first run.

/** Three lines of Python, which find a local stack, or the server of `TWINKLE_SERVER_URL`. */
export const firstRun = (baseModel: string): string =>
  [
    'from twinkle_client import init_twinkle_client, model',
    'init_twinkle_client()',
    `model.MultiLoraTransformersModel('${baseModel}').add_adapter_to_model('first', user_metadata={'name': 'first'})`,
  ].join('\n');
