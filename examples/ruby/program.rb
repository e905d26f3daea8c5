# Trains an adapter to answer a question and streams its answer, with the code that `buf generate` writes to gen, and the
# gem grpc. See docs/languages.md for the packages.
#   buf generate
#   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... ruby -I gen program.rb
require 'digest'
require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'grpc'
require 'json'
require 'securerandom'
require 'twinkle/api/data/v1/dataset_service_services_pb'
require 'twinkle/api/data/v1/loader_service_services_pb'
require 'twinkle/api/model/v1/adapter_service_services_pb'
require 'twinkle/api/model/v1/training_service_services_pb'
require 'twinkle/api/sampler/v1/sampler_service_services_pb'
require 'twinkle/api/server/v1/server_service_services_pb'

# Not `include Twinkle::Api`, because the class Data of Ruby 3.2 would hide Twinkle::Api::Data.
Datasets = Twinkle::Api::Data::V1
Model = Twinkle::Api::Model::V1
Sampler = Twinkle::Api::Sampler::V1
Server = Twinkle::Api::Server::V1
Tensors = Twinkle::Api::Tensor::V1

STEPS = 16
# The file of this program is small; chunks of 1 MiB are recommended.
CHUNK_BYTES = 64
QUESTION = 'Who are you?'
ANSWER = 'I am Twinkle, and I train models.'

ADDRESS = ENV.fetch('TWINKLE_SERVER_URL')
KEY = { 'authorization' => "Bearer #{ENV.fetch('TWINKLE_API_KEY')}" }.freeze
# The certificate authority of the gateway, if it uses TLS.
CREDENTIALS =
  if ENV['TWINKLE_CA']
    GRPC::Core::ChannelCredentials.new(File.read(ENV['TWINKLE_CA']))
  else
    :this_channel_is_insecure
  end

# Stubs of the same address share one connection.
ADAPTERS = Model::AdapterService::Stub.new(ADDRESS, CREDENTIALS)
DATASETS = Datasets::DatasetService::Stub.new(ADDRESS, CREDENTIALS)
LOADERS = Datasets::LoaderService::Stub.new(ADDRESS, CREDENTIALS)
SAMPLERS = Sampler::SamplerService::Stub.new(ADDRESS, CREDENTIALS)
SERVER = Server::ServerService::Stub.new(ADDRESS, CREDENTIALS)
TRAINING = Model::TrainingService::Stub.new(ADDRESS, CREDENTIALS)

# Returns the options of a call. Each call has a deadline, because gRPC waits forever without one.
def within(seconds)
  { metadata: KEY, deadline: Time.now + seconds }
end

def trainable_models
  info = SERVER.get_server_info(Server::GetServerInfoRequest.new, **within(60))
  info.services.flat_map { |service| service.base_models.select(&:is_trainable).map(&:base_model) }
end

# Uploads a file as a header and chunks, and returns the id of the upload.
def upload(bytes)
  header = Datasets::UploadHeader.new(
    upload_id: SecureRandom.uuid, size_bytes: bytes.bytesize, sha256: Digest::SHA256.digest(bytes)
  )
  chunks = (0...bytes.bytesize).step(CHUNK_BYTES).lazy.map do |offset|
    chunk = Tensors::TensorChunk.new(offset: offset, data: bytes.byteslice(offset, CHUNK_BYTES))
    Datasets::UploadRequest.new(chunk: chunk)
  end
  requests = [Datasets::UploadRequest.new(header: header)].each + chunks
  uploaded = DATASETS.upload(requests, **within(60))
  puts "uploaded: #{uploaded.committed_bytes}"
  uploaded.upload_id
end

# Prepares training batches on the server, which tokenizes the chats, and returns the id of their loader.
def open_loader(base_model)
  messages = [{ role: 'user', content: QUESTION }, { role: 'assistant', content: ANSWER }]
  upload_id = upload("#{JSON.generate({ messages: messages })}\n")
  source = Datasets::UploadSource.new(upload_id: upload_id, format: :FILE_FORMAT_JSONL)
  template = Datasets::TemplateConfig.new(base_model: base_model)
  request = Datasets::CreateDatasetRequest.new(
    request_id: SecureRandom.uuid,
    source: Datasets::DatasetSource.new(upload: source),
    steps: [
      Datasets::DatasetStep.new(set_template: template),
      Datasets::DatasetStep.new(encode: Datasets::EncodeStep.new)
    ]
  )
  dataset = DATASETS.create_dataset(request, **within(60)).dataset
  opening = Datasets::OpenLoaderRequest.new(
    request_id: SecureRandom.uuid, dataset_id: dataset.dataset_id, batch_size: 1
  )
  LOADERS.open_loader(opening, **within(60)).loader.loader_id
end

def create_adapter(base_model, lora_rank:)
  request = Model::CreateAdapterRequest.new(
    request_id: SecureRandom.uuid, base_model: base_model, lora_config: Model::LoraConfig.new(lora_rank: lora_rank)
  )
  ADAPTERS.create_adapter(request, **within(60)).adapter.adapter_id
end

# Trains the adapter with one stream, and returns the version that it publishes at the end.
def train(adapter_id, loader_id)
  # Without a cursor, each step reads the first batch.
  batch = Model::Batch.new(loader: Model::LoaderBatch.new(loader_id: loader_id))
  step = [
    { forward_backward: Model::ForwardBackward.new(batch: batch) },
    { clip_grad_and_step: Model::ClipGradAndStep.new(learning_rate: 0.005) }
  ]
  verbs = step * STEPS + [{ publish_version: Model::PublishVersion.new }]
  # Operations run in the order of their numbers. They are sent without waiting, so that the model is never idle.
  requests = verbs.each.with_index(1).lazy.map do |verb, number|
    operation = Model::Operation.new(adapter_id: adapter_id, sequence_number: number, **verb)
    Model::TrainRequest.new(operation: operation)
  end
  results = TRAINING.train(requests, **within(300)).map(&:result)
  failed = results.find(&:error)
  raise "operation #{failed.sequence_number} failed: #{failed.error.message}" if failed

  losses = results.filter_map(&:forward).map { |forward| format('%.3f', forward.loss / forward.label_count) }
  puts "losses: #{losses.join(' ')}"
  results.last.publish.version
end

# Returns a request that asks the question of an adapter version, or of the base model.
def sample_request(base_model, adapter: nil, **params)
  message = Datasets::Message.new(role: :ROLE_USER, parts: [Datasets::ContentPart.new(text: QUESTION)])
  chat = Sampler::ChatPrompt.new(trajectory: Datasets::Trajectory.new(messages: [message]))
  Sampler::SampleRequest.new(
    base_model: base_model,
    adapter: adapter,
    prompt: Sampler::Prompt.new(chat: chat),
    params: Sampler::SamplingParams.new(**params)
  )
end

def sample(request)
  responses = SAMPLERS.sample(request, **within(60))
  puts "sampled: #{responses.filter_map { |event| (event.delta || event.finished)&.text }.join}"
end

# Sends an invalid request, and prints the reason and the field of the error.
def refuse(base_model)
  create_adapter(base_model, lora_rank: -1)
rescue GRPC::InvalidArgument => e
  details = e.to_rpc_status.details
  reason = details.filter_map { |detail| detail.unpack(Google::Rpc::ErrorInfo) }.first.reason
  invalid = details.filter_map { |detail| detail.unpack(Google::Rpc::BadRequest) }.first.field_violations.first
  puts "refused: #{reason} #{invalid.field}"
end

# Watches the load, which never ends, until the deadline of the call.
def exceed_deadline
  SAMPLERS.watch_load(Sampler::WatchLoadRequest.new, **within(0.5)).each { |_| }
rescue GRPC::DeadlineExceeded
  puts 'deadline: DEADLINE_EXCEEDED'
end

# Cancels a long answer after its first tokens. Cancelling a call also ends its work at the sampler.
def cancel(base_model)
  operation = SAMPLERS.sample(sample_request(base_model, is_eos_ignored: true), return_op: true, **within(60))
  operation.execute.each { |_| operation.cancel }
rescue GRPC::Cancelled
  puts 'cancelled: CANCELLED'
end

def main
  models = trainable_models
  puts "models: #{models.join(' ')}"
  base_model = ENV.fetch('TWINKLE_MODEL', models.first)

  loader_id = open_loader(base_model)
  adapter_id = create_adapter(base_model, lora_rank: 8)
  version = train(adapter_id, loader_id)
  trained = Sampler::AdapterRef.new(adapter_id: adapter_id, exact: version)
  sample(sample_request(base_model, adapter: trained, max_tokens: 40, temperature: 0))

  refuse(base_model)
  exceed_deadline
  cancel(base_model)
end

main
